"""layouts_worker.py for a family of a user's own: own_family_worker.py OUT MODELS CASES"""

import layouts_worker

from megatron_rl.models import registry

if __name__ == "__main__":
    registry.add(["own_family:FAMILY"], "here")
    layouts_worker.main()
