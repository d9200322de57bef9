"""What pyproject.toml cannot say: an sdist keeps the links of the checkout.

Without it dpdist/cluster and its like would be in there twice, as folders of their own.
"""

import os
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.sdist import sdist

LINKS = ("dpdist/cluster", "dpdist/tuning", "cluster/templates/aws.yaml")


class WithLinks(sdist):
    """setuptools' own, but for the links."""

    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        for link in LINKS:
            made = Path(base_dir) / link
            if made.is_dir():
                shutil.rmtree(made)
            else:
                made.unlink(missing_ok=True)
            made.parent.mkdir(parents=True, exist_ok=True)
            made.symlink_to(os.readlink(link))


setup(cmdclass={"sdist": WithLinks})
