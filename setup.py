"""The parts of a release that pyproject.toml cannot describe: the batch scripts of slurm/, which a wheel has inside of
the package, and the metadata that depends on the repository's address: REPOSITORY_URL=https://... when it is built.

A package index shows README.md, but not the files that it links to. With the address, links lead to the files of the
release's tag, and the picture to its raw file. All other metadata is in pyproject.toml.
"""

import os
import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
version = re.search(r'^__version__ = "(.*)"', (HERE / "megatron_rl/__init__.py").read_text(), re.MULTILINE)[1]
url = os.environ.get("REPOSITORY_URL", "").rstrip("/")
readme = (HERE / "README.md").read_text()
if url:
    readme = re.sub(
        r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)]*)\)",
        lambda link: f"{link[1]}[{link[2]}]({url}/{'raw' if link[1] else 'blob'}/v{version}/{link[3]})",
        readme,
    )


class BuildWithScripts(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for file in [*HERE.glob("slurm/*.sbatch"), HERE / "slurm/job.sh", *HERE.glob("slurm/profiles/*.yaml")]:
                target = Path(self.build_lib) / "megatron_rl" / file.relative_to(HERE)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, target)


setup(
    cmdclass={"build_py": BuildWithScripts},
    long_description=readme,
    long_description_content_type="text/markdown",
    project_urls={
        "Source": url,
        "Documentation": f"{url}/blob/v{version}/docs/README.md",
        "Changelog": f"{url}/blob/v{version}/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }
    if url
    else {},
)
