"""One engine protocol (`engines.engine`) and those who keep it."""
