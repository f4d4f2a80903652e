"""Installs the lessons of tutorials/ as the data of regard.tutorials. Everything else is in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["regard*"]), "regard.tutorials"],
    package_dir={"regard.tutorials": "tutorials"},
    package_data={"regard.tutorials": ["*.py"]},
)
