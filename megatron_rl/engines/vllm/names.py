"""Names that a run and its vLLM servers must use consistently."""

TANDEM = "tandem"  # key of the Tandem RL settings, both in the server's config and in a request
ARCHITECTURE = "MegatronRlTandem"  # name of the Tandem RL model class
ADAPTER = "lora"  # key of a LoRA adapter in a request; the value is [name, id, directory, version]
