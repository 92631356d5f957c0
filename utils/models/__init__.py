"""The decoder, its sizes, its files on disk and its tokenizer."""
