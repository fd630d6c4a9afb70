"""Rules that all clients of servers share."""
