"""Whether drafting changes what is said, over HTTP."""
