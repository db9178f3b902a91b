//! Filter of a table: one line such as `val_accuracy > 0.9 and optimizer = adamw`.
//!
//! ```text
//!   filter = clause { "and" clause }
//!   clause = field operator value | word
//!   operator = "=" | "!=" | ">" | ">=" | "<" | "<=" | "~"
//! ```
//!
//! `~` means "contains". A single word matches the name, the state or a label. Values with spaces
//! are quoted.

use std::cmp::Ordering;
use std::fmt;

use stoker_api::contract::is_metric;

/// Returns whether two names mean the same metric: `val_loss` stands for `validation_loss`.
pub(crate) fn is_same_metric(one: &str, other: &str) -> bool {
    is_metric(one, other) || is_metric(other, one)
}

/// A valid filter.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Filter(Vec<Clause>);

#[derive(Clone, Debug, PartialEq)]
enum Clause {
    Compare { field: String, operator: Operator, value: String },
    Word(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operator {
    Equal,
    Unequal,
    Greater,
    AtLeast,
    Less,
    AtMost,
    Contains,
}

/// Part of a filter that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FilterError {
    word: String,
    reason: String,
}

impl fmt::Display for FilterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { word, reason } = self;
        write!(f, "`{word}`: {reason}; write such as `val_accuracy > 0.9 and optimizer = adamw`")
    }
}

/// A row that a filter can test.
pub(crate) trait Row {
    /// Returns the value of a field as text, `Some(None)` if the row has no value, and `None` if
    /// the row does not know this field. Another row may know it.
    fn field(&self, name: &str) -> Option<Option<String>>;
    /// Returns the texts that a single word is compared with.
    fn words(&self) -> Vec<String>;
}

impl Filter {
    /// Parses a filter. An empty text matches all rows.
    pub(crate) fn parse(text: &str) -> Result<Self, FilterError> {
        let tokens = tokens(text);
        let mut clauses = Vec::new();
        let mut rest = tokens.as_slice();
        while let Some((first, after)) = rest.split_first() {
            let error = |word: &Token, reason: &str| FilterError {
                word: word.text.clone(),
                reason: reason.to_owned(),
            };
            if first.operator.is_some() {
                return Err(error(first, "a field is missing before it"));
            }
            rest = after;
            let clause = match rest.split_first() {
                Some((operator, after)) if operator.operator.is_some() => {
                    let Some((value, after)) = after.split_first() else {
                        return Err(error(operator, "a value is missing after it"));
                    };
                    if value.operator.is_some() {
                        return Err(error(value, "a value is missing before it"));
                    }
                    rest = after;
                    Clause::Compare {
                        field: first.text.clone(),
                        operator: operator.operator.unwrap_or(Operator::Equal),
                        value: value.text.clone(),
                    }
                }
                _ => Clause::Word(first.text.to_lowercase()),
            };
            clauses.push(clause);
            match rest.split_first() {
                None => break,
                Some((and, after)) if and.is_and() => {
                    if after.is_empty() {
                        return Err(error(and, "a condition is missing after it"));
                    }
                    rest = after;
                }
                // Words side by side must all match.
                Some(_) => {}
            }
        }
        Ok(Self(clauses))
    }

    /// Returns an error if a clause names a field that is not known.
    pub(crate) fn check(&self, is_known: impl Fn(&str) -> bool) -> Result<(), FilterError> {
        for clause in &self.0 {
            if let Clause::Compare { field, .. } = clause
                && !is_known(field)
            {
                let reason = "is not a field of this table".to_owned();
                return Err(FilterError { word: field.clone(), reason });
            }
        }
        Ok(())
    }

    /// Returns whether a row matches all clauses.
    pub(crate) fn matches(&self, row: &impl Row) -> bool {
        self.0.iter().all(|clause| match clause {
            Clause::Word(word) => row.words().iter().any(|text| text.to_lowercase().contains(word)),
            Clause::Compare { field, operator, value } => {
                let Some(Some(actual)) = row.field(field) else {
                    return *operator == Operator::Unequal;
                };
                operator.holds(&actual, value)
            }
        })
    }
}

impl Operator {
    fn holds(self, actual: &str, value: &str) -> bool {
        let numbers = actual.parse::<f64>().ok().zip(value.parse::<f64>().ok());
        let order = match numbers {
            // A filter finds diverged trials by `= NaN`.
            Some((actual, value)) if actual.is_nan() && value.is_nan() => Some(Ordering::Equal),
            Some((actual, value)) => actual.partial_cmp(&value),
            None => Some(actual.to_lowercase().cmp(&value.to_lowercase())),
        };
        match self {
            Self::Equal => order == Some(Ordering::Equal),
            Self::Unequal => order != Some(Ordering::Equal),
            Self::Greater => order == Some(Ordering::Greater),
            Self::AtLeast => matches!(order, Some(Ordering::Greater | Ordering::Equal)),
            Self::Less => order == Some(Ordering::Less),
            Self::AtMost => matches!(order, Some(Ordering::Less | Ordering::Equal)),
            Self::Contains => actual.to_lowercase().contains(&value.to_lowercase()),
        }
    }
}

#[derive(Debug)]
struct Token {
    text: String,
    operator: Option<Operator>,
    is_quoted: bool,
}

impl Token {
    fn is_and(&self) -> bool {
        !self.is_quoted && self.text.eq_ignore_ascii_case("and")
    }
}

fn tokens(text: &str) -> Vec<Token> {
    let mut tokens = Vec::new();
    let mut chars = text.chars().peekable();
    while let Some(char) = chars.next() {
        if char.is_whitespace() {
            continue;
        }
        let operator = match char {
            '=' => Some(Operator::Equal),
            '~' => Some(Operator::Contains),
            '!' if chars.peek() == Some(&'=') => Some(Operator::Unequal),
            '>' if chars.peek() == Some(&'=') => Some(Operator::AtLeast),
            '<' if chars.peek() == Some(&'=') => Some(Operator::AtMost),
            '>' => Some(Operator::Greater),
            '<' => Some(Operator::Less),
            _ => None,
        };
        if let Some(operator) = operator {
            let mut text = char.to_string();
            if matches!(operator, Operator::Unequal | Operator::AtLeast | Operator::AtMost) {
                text.extend(chars.next());
            }
            tokens.push(Token { text, operator: Some(operator), is_quoted: false });
            continue;
        }
        let mut text = String::new();
        let is_quoted = matches!(char, '"' | '\'');
        if is_quoted {
            text.extend(chars.by_ref().take_while(|next| *next != char));
        } else {
            text.push(char);
            while let Some(next) = chars.peek().copied() {
                if next.is_whitespace() || matches!(next, '=' | '!' | '<' | '>' | '~') {
                    break;
                }
                text.push(next);
                chars.next();
            }
        }
        tokens.push(Token { text, operator: None, is_quoted });
    }
    tokens
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Trial;

    impl Row for Trial {
        fn field(&self, name: &str) -> Option<Option<String>> {
            match name {
                "accuracy" => Some(Some("0.95".to_owned())),
                "optimizer" => Some(Some("AdamW".to_owned())),
                "dropout" => Some(None),
                _ => None,
            }
        }

        fn words(&self) -> Vec<String> {
            vec!["Paused".to_owned()]
        }
    }

    #[test]
    fn clauses_select_rows() {
        let check = |text: &str, expected: bool| {
            let filter = Filter::parse(text).unwrap();
            assert_eq!(filter.matches(&Trial), expected, "{text}");
        };
        check("", true);
        check("accuracy > 0.9 and optimizer = adamw", true);
        check("accuracy>=0.95", true);
        check("accuracy < 0.95", false);
        check("accuracy != 0.95", false);
        check("optimizer ~ adam", true);
        check("optimizer = \"adam w\"", false);
        check("paused", true);
        check("paused optimizer=sgd", false);
        check("dropout > 0", false);
        check("dropout != 1", true);
    }

    #[test]
    fn errors_name_the_word() {
        let check = |text: &str, expected: &str| {
            let is_known = |field: &str| Trial.field(field).is_some();
            let error = Filter::parse(text).and_then(|filter| filter.check(is_known));
            assert!(error.unwrap_err().to_string().starts_with(expected), "{text}");
        };
        check("> 3", "`>`: a field is missing before it");
        check("accuracy >", "`>`: a value is missing after it");
        check("accuracy > = 3", "`=`: a value is missing before it");
        check("paused and", "`and`: a condition is missing after it");
        check("acuracy > 3", "`acuracy`: is not a field of this table");
    }
}
