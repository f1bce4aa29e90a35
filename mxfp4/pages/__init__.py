"""The frames, charts and evidence that pages of the book show."""
