"""A clone and an image are the ways to install Outrider: pyproject.toml says the rest."""

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel


class NoWheel(bdist_wheel):
    """Refuses to build a wheel. An editable installation (``pip install -e .``) needs none."""

    def run(self) -> None:
        """Raises SystemExit, with what to do instead."""
        raise SystemExit(
            "outrider: there is no wheel, as its packages (engine, cluster, configs, ...) have names too common for everybody's "
            "site-packages: install from the clone, with make install or pip install -e ., or use the image (Dockerfile)"
        )


setup(cmdclass={"bdist_wheel": NoWheel})
