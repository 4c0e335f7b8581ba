"""Stage 6: the checks that prove an export, and the page that shows them."""
