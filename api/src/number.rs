//! Metrics as decimal strings: JSON through an API server keeps neither NaN nor `1.0`.

/// Writes a metric so that [`parse`] gives the same bits back (every NaN becomes one NaN).
///
/// # Examples
///
/// ```
/// assert_eq!(stoker_api::number::format(0.1), "0.1");
/// assert_eq!(stoker_api::number::format(f64::NAN), "NaN");
/// assert_eq!(stoker_api::number::format(f64::NEG_INFINITY), "-inf");
/// ```
pub fn format(value: f64) -> String {
    format!("{value:?}")
}

/// Reads what [`format()`] wrote, or any decimal number; `None` for anything else.
pub fn parse(text: &str) -> Option<f64> {
    text.parse().ok()
}
