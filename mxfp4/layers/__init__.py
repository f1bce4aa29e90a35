"""Layers: recipes, MXFP4Linear and `convert`, which puts it into a model."""
