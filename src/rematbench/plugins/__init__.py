"""Methods as files: found, checked, built with parameters, composed."""
