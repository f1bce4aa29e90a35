"""Corpora that Megatron-LM has tokenized: `.bin` and `.idx` files, read in Megatron's order of samples."""
