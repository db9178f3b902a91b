//! Label selectors, with the syntax of kubectl.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

/// Requirements on labels, all of which must hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Selector(Vec<Requirement>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Requirement {
    /// The label has one of these values.
    In(String, Vec<String>),
    /// The label is missing or has none of these values.
    NotIn(String, Vec<String>),
    Exists(String),
    Missing(String),
}

impl Selector {
    pub(super) fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        self.0.iter().all(|requirement| match requirement {
            Requirement::In(key, values) => {
                labels.get(key).is_some_and(|value| values.contains(value))
            }
            Requirement::NotIn(key, values) => {
                labels.get(key).is_none_or(|value| !values.contains(value))
            }
            Requirement::Exists(key) => labels.contains_key(key),
            Requirement::Missing(key) => !labels.contains_key(key),
        })
    }
}

impl FromStr for Selector {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut requirements = Vec::new();
        for part in split(text) {
            let requirement = parse(part.trim());
            requirements.push(requirement.ok_or_else(|| {
                format!(
                    "invalid label selector {:?}; write KEY=VALUE, KEY!=VALUE, KEY, !KEY, `KEY in \
                     (A, B)` or `KEY notin (A, B)`",
                    part.trim()
                )
            })?);
        }
        Ok(Self(requirements))
    }
}

/// Splits at commas outside of parentheses.
fn split(text: &str) -> Vec<&str> {
    let mut is_inside = false;
    text.split(|char| {
        is_inside = (is_inside || char == '(') && char != ')';
        char == ',' && !is_inside
    })
    .collect()
}

fn parse(text: &str) -> Option<Requirement> {
    let key = |text: &str| Some(text.trim().to_owned()).filter(|key| is_key(key));
    let value = |text: &str| Some(text.trim().to_owned()).filter(|value| is_value(value));
    if let Some((name, rest)) = text.split_once(char::is_whitespace)
        && let Some((operator, values)) = rest.trim().split_once('(')
        && let Some(values) = values.strip_suffix(')')
    {
        let values = values.split(',').map(value).collect::<Option<Vec<_>>>()?;
        return match operator.trim() {
            "in" => Some(Requirement::In(key(name)?, values)),
            "notin" => Some(Requirement::NotIn(key(name)?, values)),
            _ => None,
        };
    }
    if let Some((name, of)) = text.split_once("!=") {
        return Some(Requirement::NotIn(key(name)?, vec![value(of)?]));
    }
    if let Some((name, of)) = text.split_once("==").or_else(|| text.split_once('=')) {
        return Some(Requirement::In(key(name)?, vec![value(of)?]));
    }
    match text.strip_prefix('!') {
        Some(name) => key(name).map(Requirement::Missing),
        None => key(text).map(Requirement::Exists),
    }
}

fn is_key(text: &str) -> bool {
    let is_part = |char: char| char.is_ascii_alphanumeric() || "-_./".contains(char);
    text.starts_with(|char: char| char.is_ascii_alphanumeric()) && text.chars().all(is_part)
}

fn is_value(text: &str) -> bool {
    text.chars().all(|char| char.is_ascii_alphanumeric() || "-_.".contains(char))
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, requirement) in self.0.iter().enumerate() {
            f.write_str(if i == 0 { "" } else { "," })?;
            match requirement {
                Requirement::In(key, values) => write!(f, "{key} in ({})", values.join(","))?,
                Requirement::NotIn(key, values) => {
                    write!(f, "{key} notin ({})", values.join(","))?;
                }
                Requirement::Exists(key) => f.write_str(key)?,
                Requirement::Missing(key) => write!(f, "!{key}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: bool) {
        let labels = [("team", "a"), ("stoker.dev/trial", "m-0"), ("empty", "")];
        let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let selector: Selector = text.parse().unwrap();
        assert_eq!(selector.matches(&labels), expected, "{text}");
        // The API server gets the same requirements.
        let again: Selector = selector.to_string().parse().unwrap();
        assert_eq!(again, selector, "{text}");
    }

    #[test]
    fn labels_are_matched() {
        check("team=a", true);
        check("team==b", false);
        check("team!=b", true);
        check("other!=b", true);
        check("team in (b, a)", true);
        check("team notin (a,b),team", false);
        check("team,!other", true);
        check("other", false);
        check("stoker.dev/trial=m-0,team=a", true);
        check("empty=", true);
    }

    #[test]
    fn invalid_selectors_are_refused() {
        for text in ["=a", "team=a b", "team in a", "team of (a)", "", "team=a,", "a!"] {
            let error = text.parse::<Selector>().unwrap_err();
            assert!(error.contains("write KEY=VALUE"), "{error}");
        }
    }
}
