"""Numbers and times for people: the same in the progress bar, tables and charts."""


def show_number(value: float | None, num_digits: int = 4) -> str:
    """`0.1235`, `15`, `37,128`, `1.200e-07`; None is "nan"."""
    if value is None:
        return "nan"
    size = abs(value)
    if size >= 1e9 or 0 < size < 1e-4:
        return f"{value:.{num_digits - 1}e}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.{num_digits}g}"


def show_rate(per_s: float) -> str:
    """With three digits: it changes all the time."""
    return show_number(per_s, 3)


def show_duration(seconds: float) -> str:
    """`0:07`, `12:30`, `3:05:00`, `2 d 3 h`."""
    whole = max(0, int(seconds))  # as `trn status` says it
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours}:{minutes % 60:02}:{whole % 60:02}"
    return f"{minutes}:{whole % 60:02}"
