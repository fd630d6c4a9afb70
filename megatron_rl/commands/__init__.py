"""What each command of the program does once its config is read: the only code that knows every part."""
