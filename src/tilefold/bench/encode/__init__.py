"""The benchmark of encoding: whole jobs, texts to Parquet, beside the stock encoder and beside their own floors."""
