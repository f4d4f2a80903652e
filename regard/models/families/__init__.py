"""One file per family: config mapping and weight names."""
