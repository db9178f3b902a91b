//! Human-readable ages, sizes, durations and lists.

use std::time::{Duration, SystemTime};

use serde_json::Value;
use stoker_api::time::Timestamp;
pub(crate) use stoker_ui::bytes;

use crate::print;

/// Returns a number of objects with the first and the last, such as `4 ranks, 0 to 3`.
pub(crate) fn numbered(
    num: usize,
    noun: &str,
    first: impl std::fmt::Display,
    last: impl std::fmt::Display,
) -> String {
    match num {
        0 => format!("no {noun}s"),
        1 => format!("1 {noun}, {first}"),
        _ => format!("{num} {noun}s, {first} to {last}"),
    }
}

/// Returns `trial 3` or `trials 3, 5`, with at most `listed_max` indexes.
pub(crate) fn trials(indexes: &[u32], listed_max: usize) -> String {
    let listed: Vec<String> = indexes.iter().take(listed_max).map(u32::to_string).collect();
    let noun = if indexes.len() == 1 { "trial" } else { "trials" };
    let rest = indexes.len() - listed.len();
    let more = if rest > 0 { format!(" and {rest} more") } else { String::new() };
    format!("{noun} {}{more}", listed.join(", "))
}

/// Returns the current time.
pub(crate) fn now() -> Timestamp {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Timestamp(i64::try_from(since.as_secs()).unwrap_or(i64::MAX))
}

/// Formats a duration with at most two units, like kubectl: `45s`, `5m30s`, `3h`, `2d4h`.
pub(crate) fn length(seconds: u64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    let two = |a: u64, unit_a: &str, b: u64, unit_b: &str| match b {
        0 => format!("{a}{unit_a}"),
        b => format!("{a}{unit_a}{b}{unit_b}"),
    };
    match seconds {
        0..120 => format!("{seconds}s"),
        120..600 => two(minutes, "m", seconds % 60, "s"),
        600..10_800 => format!("{minutes}m"),
        10_800..28_800 => two(hours, "h", minutes % 60, "m"),
        28_800..172_800 => format!("{hours}h"),
        172_800..691_200 => two(days, "d", hours % 24, "h"),
        691_200..63_072_000 => format!("{days}d"),
        _ => two(days / 365, "y", days % 365, "d"),
    }
}

/// Number of significant digits of a number in text.
const DIGITS: usize = 5;

/// Formats a hyperparameter. Floats have at most five significant digits; integers are exact.
pub(crate) fn short_value(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Number(number) if number.is_f64() => {
            short_float(number.as_f64().unwrap_or_default())
        }
        other => other.to_string(),
    }
}

fn short_float(value: f64) -> String {
    let scientific = format!("{value:.*e}", DIGITS - 1);
    let Some((digits, exponent)) = scientific.split_once('e') else { return value.to_string() };
    let trim = |text: &str| match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text.to_owned(),
    };
    let exponent: i32 = exponent.parse().unwrap_or_default();
    match exponent {
        -4..=4 => {
            let decimals = usize::try_from(4 - exponent).unwrap_or_default();
            trim(&format!("{value:.decimals$}"))
        }
        _ => format!("{}e{exponent}", trim(digits)),
    }
}

/// Returns an enum value as it is spelled in the objects.
pub(crate) fn word(value: &impl serde::Serialize) -> String {
    serde_json::json!(value).as_str().unwrap_or_default().to_owned()
}

/// Formats the time from `since` to `now`; `-` without `since`.
pub(crate) fn age(since: Option<Timestamp>, now: Timestamp) -> String {
    since.map_or_else(|| "-".to_owned(), |since| length(now.seconds_since(since)))
}

/// Returns the creation time of an object.
pub(crate) fn created(metadata: &kube::core::ObjectMeta) -> Option<Timestamp> {
    metadata.creation_timestamp.as_ref().map(|time| Timestamp(time.0.as_second()))
}

/// Parses a duration: `90` (seconds), `90s`, `5m`, `1h30m`, `2d`.
pub(crate) fn parse_length(text: &str) -> Result<Duration, String> {
    let bad = || format!("invalid duration {text:?}; write it as 90s, 5m, 1h30m or 2d");
    let mut seconds: u64 = 0;
    let mut digits = String::new();
    for char in text.chars() {
        if char.is_ascii_digit() {
            digits.push(char);
            continue;
        }
        let unit = match char {
            's' => 1,
            'm' => 60,
            'h' => 3600,
            'd' => 86_400,
            _ => return Err(bad()),
        };
        let part = digits.parse::<u64>().ok().and_then(|count| count.checked_mul(unit));
        seconds = part.and_then(|part| seconds.checked_add(part)).ok_or_else(bad)?;
        digits.clear();
    }
    // A number without a unit counts seconds.
    match (digits.is_empty(), seconds) {
        (true, 0) if !text.starts_with('0') => Err(bad()),
        (true, seconds) => Ok(Duration::from_secs(seconds)),
        (false, 0) => digits.parse().map(Duration::from_secs).map_err(|_| bad()),
        (false, _) => Err(bad()),
    }
}

/// Names and values in two columns. Further lines of a value are indented to the value column.
#[derive(Debug, Default)]
pub(crate) struct Fields(Vec<(&'static str, String)>);

impl Fields {
    /// Adds a field, unless the value is empty.
    pub(crate) fn add(&mut self, name: &'static str, value: impl Into<String>) {
        let value = value.into();
        if !value.is_empty() {
            self.0.push((name, value));
        }
    }
}

impl std::fmt::Display for Fields {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let width = self.0.iter().map(|(name, _)| name.len()).max().unwrap_or_default() + 3;
        for (i, (name, value)) in self.0.iter().enumerate() {
            let newline = if i == 0 { "" } else { "\n" };
            let indented = value.replace('\n', &format!("\n{:width$}", ""));
            write!(f, "{newline}{:<width$}{indented}", format!("{name}:"))?;
        }
        Ok(())
    }
}

/// Formats a table under a title; empty without rows.
pub(crate) fn section(title: &str, header: &[&str], rows: &[Vec<String>]) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let table = print::table(header, rows).replace('\n', "\n  ");
    format!("\n\n{title}:\n  {table}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_at_most_two_units() {
        let check = |seconds: u64, expected: &str| assert_eq!(length(seconds), expected);
        check(0, "0s");
        check(119, "119s");
        check(120, "2m");
        check(330, "5m30s");
        check(660, "11m");
        check(3 * 3600 + 60, "3h1m");
        check(9 * 3600 + 60, "9h");
        check(3 * 86_400 + 2 * 3600, "3d2h");
        check(100 * 86_400, "100d");
        check(800 * 86_400, "2y70d");
    }

    #[test]
    fn floats_have_at_most_five_significant_digits() {
        let check = |value: Value, expected: &str| assert_eq!(short_value(&value), expected);
        check(0.5.into(), "0.5");
        check(0.123_456_78.into(), "0.12346");
        check(0.000_123_456_78.into(), "0.00012346");
        check(0.000_012_345_678.into(), "1.2346e-5");
        check(0.001.into(), "0.001");
        check((-3.0).into(), "-3");
        check(12_345.678.into(), "12346");
        check(99_999.9.into(), "1e5");
        check(1_234_567.0.into(), "1.2346e6");
        check(0.0.into(), "0");
        check(1_234_567.into(), "1234567");
        check("adam".into(), "adam");
        check(true.into(), "true");
    }

    #[test]
    fn numbers_of_objects_name_the_first_and_the_last() {
        assert_eq!(numbered(0, "trial", "", ""), "no trials");
        assert_eq!(numbered(1, "rank", 0, 0), "1 rank, 0");
        assert_eq!(numbered(3, "trial", "a-0", "a-2"), "3 trials, a-0 to a-2");
    }

    #[test]
    fn durations_are_parsed() {
        let check = |text: &str, expected: Option<u64>| {
            let seconds = parse_length(text).ok().map(|duration| duration.as_secs());
            assert_eq!(seconds, expected, "{text}");
        };
        check("90", Some(90));
        check("90s", Some(90));
        check("5m", Some(300));
        check("1h30m", Some(5400));
        check("2d", Some(172_800));
        check("0", Some(0));
        check("0s", Some(0));
        for bad in ["", "s", "5x", "-1s", "1h30", "99999999999999999999s", "5 m"] {
            check(bad, None);
        }
    }

    #[test]
    fn fields_are_aligned_and_empty_ones_omitted() {
        let mut fields = Fields::default();
        fields.add("Name", "a");
        fields.add("Nothing", "");
        fields.add("Metrics", "x\ny");
        assert_eq!(fields.to_string(), "Name:     a\nMetrics:  x\n          y");
    }
}
