def page(reports, names):
    return "<html></html>"
