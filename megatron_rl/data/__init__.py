"""Problems and pairs: reading them from files, and the toy task."""
