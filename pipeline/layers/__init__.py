"""What layer ids mean: to every class of the installed engines, asked and proven."""
