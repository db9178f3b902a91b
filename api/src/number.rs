//! Metrics as decimal strings. JSON has no NaN, and an API server turns the number `1.0` into `1`.

/// Formats a metric so that [`parse`] restores it bit-identically, except for the payload of NaN.
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

/// Parses the output of [`format()`] or any other decimal number; `None` for other text.
pub fn parse(text: &str) -> Option<f64> {
    text.parse().ok()
}

/// Maximum length in bytes of a metric in a record. [`format()`] writes at most 24.
pub const METRIC_BYTES_MAX: usize = 32;

/// Limits a metric to [`METRIC_BYTES_MAX`] bytes of ASCII letters, digits, `+`, `-`, `.`, `_` and
/// spaces. Text beyond this limit is reformatted if it is a number, and becomes `NaN` otherwise.
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
    fn long_metrics_are_reformatted() {
        let check = |text: &str, expected: &str| {
            let mut bounded = text.to_owned();
            bound(&mut bounded);
            assert_eq!(bounded, expected);
            assert!(bounded.len() <= METRIC_BYTES_MAX);
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
