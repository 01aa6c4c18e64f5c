"""Methods as files: finding, checking, building with parameters, composing."""
