"""A package, so that pytest ends its fixtures of scope "package", the browser, with its last test."""
