def product_rows():
    return []
