"""Parts of the encoding pipeline: tokens, batches, threads and copies between CPU and device."""
