"""`python -m megarl.recipe`: check a recipe, print it resolved, or make its reference page."""

import sys

from megarl.recipe import main

sys.exit(main())
