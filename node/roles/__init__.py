"""One role's life a module; which role is decided by ``protocol.work.assignment``."""
