"""Names that a run and its vLLM servers must use consistently."""

TANDEM = "tandem"  # key of the Tandem RL settings, in the server's config and in a request
ARCHITECTURE = "MegatronRlTandem"  # name of the Tandem RL model class
ADAPTER = "lora"  # key of a request's LoRA adapter: its name, id, directory and version
