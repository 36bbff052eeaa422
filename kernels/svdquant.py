class SVDQuantWeight: pass
