"""Where adapters meet: ranks, engines, servers and models of one run are opened and closed here."""
