"""Fixtures with the scope "package" end with the last test of this folder, because this file makes it one."""
