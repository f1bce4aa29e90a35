"""What single pages of the book compute and draw, one module a subject."""
