"""Arrays and pytrees that ops take: checks, precision, derivatives."""
