"""Parts of the encoding pipeline: token ids, batches cut by tokens, threads that work ahead,
asynchronous copies.
"""
