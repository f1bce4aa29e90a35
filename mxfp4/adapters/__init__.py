"""Other frameworks, one file each: what they call our layer by. Importing one needs that framework."""
