"""Write the project of a new plug-in: ``bcg new-backend NAME``."""
