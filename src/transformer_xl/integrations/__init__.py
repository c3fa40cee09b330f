"""This package in other libraries: each module needs the library that it is named for, an extra of this package."""
