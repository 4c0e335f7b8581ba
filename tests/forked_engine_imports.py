from forked_engine import import_engine

import_engine()
