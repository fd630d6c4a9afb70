"""Names that a run and its vLLM servers agree on."""

TANDEM = "tandem"  # the settings of a tandem: of the server, and of a request
ARCHITECTURE = "MegatronRlTandem"  # the model class of a tandem
ADAPTER = "lora"  # the adapter of a request: its name, number, directory and version
