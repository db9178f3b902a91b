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

/// The most bytes of a metric in a record. [`format()`] writes at most 24.
pub const METRIC_BYTES_MAX: usize = 32;

/// Writes a metric as [`format()`] does if it is longer than [`METRIC_BYTES_MAX`] or has characters that
/// no number has; it becomes `NaN` if it is not a number.
pub fn bound(text: &mut String) {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"+-._ ".contains(&byte);
    if text.len() > METRIC_BYTES_MAX || !text.bytes().all(is_plain) {
        *text = format(parse(text).unwrap_or(f64::NAN));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_metrics_are_written_again() {
        let check = |text: &str, expected: &str| {
            let mut found = text.to_owned();
            bound(&mut found);
            assert_eq!(found, expected);
            assert!(found.len() <= METRIC_BYTES_MAX);
        };
        check("0.1", "0.1");
        check("a word", "a word");
        check("\u{1}", "NaN");
        check(&format!("0.5{}", "0".repeat(100)), "0.5");
        check(&"x".repeat(100), "NaN");
        check(&format(-f64::MAX), "-1.7976931348623157e308");
        check(&format(-f64::MIN_POSITIVE), "-2.2250738585072014e-308");
    }
}
