//! Numbers, times and names as the page shows them.

use stoker_api::number;
use stoker_api::time::Timestamp;

/// Shown instead of a value that is missing.
pub(crate) const NONE: &str = "–";
const MINUS: char = '\u{2212}';
/// Maximum number of characters of a name; longer ones are shortened in the middle.
const NAME_CHARS_MAX: usize = 40;

/// Returns a result with four decimals, or with four significant digits if it is very small or
/// large.
pub(crate) fn result(value: f64) -> String {
    if !value.is_finite() {
        return non_finite(value);
    }
    let size = value.abs();
    if value != 0.0 && !(1e-3..1e6).contains(&size) {
        return with_minus(&format!("{value:.3e}"));
    }
    with_minus(&format!("{value:.4}"))
}

/// Returns a result that is a decimal string, or a dash.
pub(crate) fn result_text(value: Option<&str>) -> String {
    value.and_then(number::parse).map_or_else(|| NONE.to_owned(), result)
}

/// Returns a result that may be NaN (`None`).
pub(crate) fn optional(value: Option<f64>) -> String {
    value.map_or_else(|| NONE.to_owned(), result)
}

/// Returns a hyperparameter: numbers with at most five significant digits, texts as they are.
pub(crate) fn hyperparameter(value: &serde_json::Value) -> String {
    match value {
        serde_json::Value::Null => NONE.to_owned(),
        serde_json::Value::String(text) => name(text),
        serde_json::Value::Number(number) if number.is_f64() => {
            number.as_f64().map_or_else(|| number.to_string(), significant)
        }
        serde_json::Value::Number(number) => with_minus(&number.to_string()),
        other => name(&other.to_string()),
    }
}

/// Returns a number with at most five significant digits.
pub(crate) fn significant(value: f64) -> String {
    if !value.is_finite() {
        return non_finite(value);
    }
    if value == 0.0 {
        return "0".to_owned();
    }
    let size = value.abs();
    if !(1e-3..1e6).contains(&size) {
        let text = format!("{value:.4e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        return with_minus(&format!("{}e{exponent}", trim(digits)));
    }
    let before_point = size.log10().floor() as i32 + 1;
    let decimals = usize::try_from(5 - before_point).unwrap_or(0);
    with_minus(trim(&format!("{value:.decimals$}")))
}

fn trim(digits: &str) -> &str {
    match digits.contains('.') {
        true => digits.trim_end_matches('0').trim_end_matches('.'),
        false => digits,
    }
}

fn non_finite(value: f64) -> String {
    with_minus(&number::format(value))
}

fn with_minus(text: &str) -> String {
    text.replace('-', &MINUS.to_string())
}

/// Returns a whole number with commas, such as `9,340`.
pub(crate) fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (position, digit) in digits.chars().enumerate() {
        if position > 0 && (digits.len() - position).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Returns a number with its noun, such as `1 trial` or `2 trials`.
pub(crate) fn num(number: usize, noun: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{} {noun}{plural}", count(number as u64))
}

/// Returns a duration in its two largest units: `45 s`, `14 min 38 s`, `2 h 31 min`, `3 d 4 h`.
pub(crate) fn duration(seconds: u64) -> String {
    let pair = |big: u64, unit: &str, small: u64, small_unit: &str| match small {
        0 => format!("{big} {unit}"),
        small => format!("{big} {unit} {small} {small_unit}"),
    };
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => pair(seconds / 60, "min", seconds % 60, "s"),
        3600..86_400 => pair(seconds / 3600, "h", seconds % 3600 / 60, "min"),
        _ => pair(seconds / 86_400, "d", seconds % 86_400 / 3600, "h"),
    }
}

/// Returns a duration in its largest unit: `45 s`, `14 min`, `2 h`, `3 d`.
pub(crate) fn age(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min", seconds / 60),
        3600..86_400 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86_400),
    }
}

/// Returns hours with two decimals below 10, one below 1,000, and none above.
pub(crate) fn hours(seconds: u64) -> String {
    let hours = seconds as f64 / 3600.0;
    match hours {
        hours if hours < 10.0 => format!("{hours:.2}"),
        hours if hours < 1000.0 => format!("{hours:.1}"),
        hours => count(hours as u64),
    }
}

/// Returns a size: `512 B`, `95 MB`, `1.3 GB`.
pub fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["kB", "MB", "GB", "TB"];
    if bytes < 1000 {
        return format!("{bytes} B");
    }
    let (mut value, mut unit) = (bytes as f64 / 1000.0, 0);
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    let digits = usize::from(value < 9.95);
    let text = format!("{value:.digits$}");
    format!("{} {}", text.strip_suffix(".0").unwrap_or(&text), UNITS[unit])
}

/// Returns a time with its zone, and with the date unless it is today: `14:04:26 UTC`. Scripts
/// replace it by local time.
pub(crate) fn clock(at: Timestamp) -> String {
    clock_on(at, now())
}

fn clock_on(at: Timestamp, today: Timestamp) -> String {
    let (at, today) = (at.to_string(), today.to_string());
    let at = match (at.split_once('T'), today.split_once('T')) {
        (Some((date, time)), Some((today, _))) if date == today => time.to_owned(),
        _ => at.replace('T', " "),
    };
    at.replace('Z', " UTC")
}

/// Returns the current time.
pub(crate) fn now() -> Timestamp {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    Timestamp(since.map_or(0, |since| since.as_secs() as i64))
}

/// Returns the seconds since 1970 of an object's time.
pub(crate) fn seconds_of(
    time: &k8s_openapi::apimachinery::pkg::apis::meta::v1::Time,
) -> Option<i64> {
    Some(time.0.as_second())
}

/// Shows control characters and marks of the writing direction as escapes, and shortens a long name
/// in the middle.
pub(crate) fn name(text: &str) -> String {
    let escaped = escape(text);
    let chars: Vec<char> = escaped.chars().collect();
    if chars.len() <= NAME_CHARS_MAX {
        return escaped;
    }
    let half = (NAME_CHARS_MAX - 1) / 2;
    let (begin, end) = (&chars[..half + 1], &chars[chars.len() - half..]);
    format!("{}…{}", begin.iter().collect::<String>(), end.iter().collect::<String>())
}

fn is_hidden(char: char) -> bool {
    (char.is_control() && char != '\n' && char != '\t')
        || matches!(char, '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}')
        || matches!(char, '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// Shows control characters and marks of the writing direction as escapes.
pub(crate) fn escape(text: &str) -> String {
    escape_with(text, |code| format!("\\u{{{code:x}}}"))
}

/// Same in JSON for a command to copy: the escapes are those of JSON, so its values stay.
pub(crate) fn escape_json(json: &str) -> String {
    escape_with(json, |code| format!("\\u{code:04x}"))
}

fn escape_with(text: &str, show: impl Fn(u32) -> String) -> String {
    if !text.contains(is_hidden) {
        return text.to_owned();
    }
    let mut escaped = String::with_capacity(text.len() + 8);
    for char in text.chars() {
        match is_hidden(char) {
            true => escaped.push_str(&show(u32::from(char))),
            false => escaped.push(char),
        }
    }
    escaped
}

/// Encodes a text as part of a query: everything except letters, digits and `-._~`.
pub(crate) fn query(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                encoded.push(char::from(byte));
            }
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn results_have_four_decimals() {
        let check = |value: f64, expected: &str| assert_eq!(result(value), expected);
        check(0.92994, "0.9299");
        check(-0.5, "−0.5000");
        check(0.0, "0.0000");
        check(1.25e-7, "1.250e−7");
        check(3e9, "3.000e9");
        check(f64::NAN, "NaN");
        check(f64::NEG_INFINITY, "−inf");
    }

    #[test]
    fn hyperparameters_have_five_significant_digits() {
        let check = |value: serde_json::Value, expected: &str| {
            assert_eq!(hyperparameter(&value), expected, "{value}");
        };
        check(json!(0.007_235_840_079), "0.0072358");
        check(json!(0.000_123_456), "1.2346e−4");
        check(json!(123.456_789), "123.46");
        check(json!(99_999.9), "100000");
        check(json!(1024), "1024");
        check(json!(-3), "−3");
        check(json!("adamw"), "adamw");
        check(json!(null), "–");
        check(json!(true), "true");
    }

    #[test]
    fn durations_have_two_units() {
        let check = |seconds: u64, expected: &str| assert_eq!(duration(seconds), expected);
        check(45, "45 s");
        check(878, "14 min 38 s");
        check(120, "2 min");
        check(9060, "2 h 31 min");
        check(90_000, "1 d 1 h");
    }

    #[test]
    fn times_have_a_date_unless_it_is_today() {
        let time = |text: &str| text.parse::<Timestamp>().unwrap();
        let check = |today: &str, expected: &str| {
            assert_eq!(clock_on(time("2026-11-24T23:04:26Z"), time(today)), expected, "{today}");
        };
        check("2026-11-24T23:59:59Z", "23:04:26 UTC");
        check("2026-11-25T00:00:00Z", "2026-11-24 23:04:26 UTC");
    }

    #[test]
    fn hostile_names_are_short_and_visible() {
        assert_eq!(name("a\u{202e}b\u{7}"), "a\\u{202e}b\\u{7}");
        assert_eq!(name("a\u{61c}b\u{206f}"), "a\\u{61c}b\\u{206f}");
        let long = name(&"x".repeat(10_000));
        assert_eq!(long.chars().count(), NAME_CHARS_MAX);
        assert!(long.contains('…'));
    }

    #[test]
    fn sizes_are_short() {
        let check = |size: u64, expected: &str| assert_eq!(bytes(size), expected);
        check(0, "0 B");
        check(999, "999 B");
        check(1000, "1 kB");
        check(1250, "1.2 kB");
        check(256_000, "256 kB");
        check(999_999, "1 MB");
        check(95_000_000, "95 MB");
        check(1_300_000_000, "1.3 GB");
    }

    #[test]
    fn counts_have_commas() {
        assert_eq!(count(999), "999");
        assert_eq!(count(1000), "1,000");
        assert_eq!(count(1_234_567), "1,234,567");
        assert_eq!(query("a b&c=é"), "a%20b%26c%3D%C3%A9");
    }
}
