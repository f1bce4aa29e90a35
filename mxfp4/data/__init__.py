"""Data: corpora, tokenizers, packed corpora and sources of known entropy."""
