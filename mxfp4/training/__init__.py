"""Training: recipes, layers, models, corpora and the loop. Imports the numerics, never the experiments."""
