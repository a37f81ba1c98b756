"""Gathers the hostile files of all modules, which add theirs to one table."""

import hostile_cases
import hostile_formats
import hostile_languages
import hostile_pytorch
import hostile_stores

MODULES = hostile_cases, hostile_formats, hostile_pytorch
CASES = hostile_cases.CASES | hostile_stores.QUICK | hostile_languages.QUICK
SLOW_CASES = {
    name: case
    for name, case in (hostile_stores.STORES | hostile_languages.ALL).items()
    if name not in CASES
}
