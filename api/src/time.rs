//! Timestamps in the format of Kubernetes.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Seconds since 1970-01-01T00:00:00Z. Serialized as RFC 3339 in UTC, such as
/// `2026-11-21T19:04:26Z`.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(try_from = "String", into = "String")]
pub struct Timestamp(
    /// The seconds.
    pub i64,
);

/// Text that is not a timestamp.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a time in UTC; write it as 2026-11-21T19:04:26Z")]
pub struct NoTimestamp(
    /// The invalid text.
    pub String,
);

const DAY_SECONDS: i64 = 86_400;

impl Timestamp {
    /// Returns the seconds from `earlier` to `self`; 0 if `earlier` is later.
    pub fn seconds_since(self, earlier: Self) -> u64 {
        u64::try_from(self.0 - earlier.0).unwrap_or(0)
    }

    /// Returns the timestamp `seconds` later.
    #[must_use]
    pub fn plus(self, seconds: u64) -> Self {
        Self(self.0.saturating_add_unsigned(seconds))
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (days, seconds) = (self.0.div_euclid(DAY_SECONDS), self.0.rem_euclid(DAY_SECONDS));
        let (year, month, day) = civil_from_days(days);
        let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
        write!(f, "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
    }
}

impl FromStr for Timestamp {
    type Err = NoTimestamp;

    /// Parses RFC 3339 in UTC. Fractions of a second are truncated.
    fn from_str(text: &str) -> Result<Self, NoTimestamp> {
        parse(text).ok_or_else(|| NoTimestamp(text.to_owned()))
    }
}

impl TryFrom<String> for Timestamp {
    type Error = NoTimestamp;

    fn try_from(text: String) -> Result<Self, NoTimestamp> {
        text.parse()
    }
}

impl From<Timestamp> for String {
    fn from(time: Timestamp) -> Self {
        time.to_string()
    }
}

#[cfg(feature = "crd")]
impl schemars::JsonSchema for Timestamp {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Timestamp".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "type": "string", "format": "date-time" })
    }
}

fn parse(text: &str) -> Option<Timestamp> {
    let rest = text.strip_suffix('Z')?;
    let (rest, fraction) = rest.split_once('.').unwrap_or((rest, "0"));
    let is_fraction = !fraction.is_empty() && fraction.bytes().all(|byte| byte.is_ascii_digit());
    let (date, time) = rest.split_once('T')?;
    let numbers = |text: &str, mark: char| -> Option<[i64; 3]> {
        let parts: Option<Vec<i64>> = text.split(mark).map(|part| part.parse().ok()).collect();
        parts?.try_into().ok()
    };
    let [year, month, day] = numbers(date, '-')?;
    let [hour, minute, second] = numbers(time, ':')?;
    let seconds = days_from_civil(year, month, day) * DAY_SECONDS
        + hour * 3600
        + minute * 60
        + second.min(59);
    let is_same = Timestamp(seconds).to_string() == format!("{rest}Z") || second == 60;
    (is_fraction && is_same).then_some(Timestamp(seconds))
}

/// Returns the days from 1970-01-01 to a date of the Gregorian calendar. The algorithm uses eras
/// of 400 years that start in March: <https://howardhinnant.github.io/date_algorithms.html>.
fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    era * 146_097 + day_of_era - 719_468
}

/// The inverse of [`days_from_civil`].
fn civil_from_days(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let era = days.div_euclid(146_097);
    let day_of_era = days.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, seconds: Option<i64>) {
        assert_eq!(text.parse().ok(), seconds.map(Timestamp), "{text}");
    }

    #[test]
    fn only_valid_timestamps_are_parsed() {
        check("1970-01-01T00:00:00Z", Some(0));
        check("2000-02-29T12:00:00Z", Some(951_825_600));
        check("2026-11-21T19:04:26Z", Some(1_795_287_866));
        check("2026-11-21T19:04:26.123456Z", Some(1_795_287_866));
        check("1969-12-31T23:59:59Z", Some(-1));
        check("2026-02-30T00:00:00Z", None);
        check("2026-11-21T24:00:00Z", None);
        check("2026-11-21T19:04:26+01:00", None);
        check("2026-11-21 19:04:26Z", None);
        check("", None);
    }

    #[test]
    fn formatted_timestamps_parse_back() {
        for seconds in (-90_000_000_000..90_000_000_000).step_by(86_399_999) {
            let time = Timestamp(seconds);
            let in_range = (0..253_402_300_800).contains(&seconds);
            assert!(!in_range || time.to_string().parse() == Ok(time), "{time}");
        }
    }
}
