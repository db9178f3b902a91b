//! What a plain scalar means: YAML 1.2, less what YAML 1.1 reads differently.

use serde_json::{Number, Value};

/// A plain scalar's meaning.
#[derive(Debug, PartialEq)]
pub(super) enum Scalar {
    /// It stands for this.
    Value(Value),
    /// It has no value that is the same everywhere; the rule says why.
    Refused(&'static str),
}

/// Reads a plain scalar.
pub(super) fn resolve(text: &str) -> Scalar {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return Scalar::Value(Value::Null),
        "true" | "True" | "TRUE" => return Scalar::Value(Value::Bool(true)),
        "false" | "False" | "FALSE" => return Scalar::Value(Value::Bool(false)),
        _ => {}
    }
    let lower = text.to_ascii_lowercase();
    if matches!(lower.as_str(), "yes" | "no" | "on" | "off") {
        return Scalar::Refused(
            "is a boolean to some readers of YAML and a string to others: write true or false, or \
             put it in quotes",
        );
    }
    let unsigned = lower.strip_prefix(['+', '-']).unwrap_or(&lower);
    if matches!(unsigned, ".inf" | ".nan") {
        return Scalar::Refused("must be a finite number");
    }
    if let Some(radix) = radix(unsigned) {
        return integer(i64::from_str_radix(&unsigned[2..], radix).ok());
    }
    if !unsigned.is_empty() && unsigned.bytes().all(|byte| byte.is_ascii_digit()) {
        if unsigned.len() > 1 && unsigned.starts_with('0') {
            return Scalar::Refused(
                "is octal to some readers of YAML and decimal to others: drop the leading zeros, \
                 or put it in quotes",
            );
        }
        return integer(text.parse().ok());
    }
    if is_float(unsigned) {
        // Rust reads `1.`, `.5` and `+1`, as YAML does.
        let number = text.parse().ok().and_then(Number::from_f64);
        return match number {
            Some(number) => Scalar::Value(Value::Number(number)),
            None => Scalar::Refused("must be a finite number"),
        };
    }
    Scalar::Value(Value::from(text))
}

fn integer(value: Option<i64>) -> Scalar {
    value.map_or(
        Scalar::Refused("an integer must lie between -2^63 and 2^63 - 1; put it in quotes"),
        |value| Scalar::Value(Value::from(value)),
    )
}

fn radix(text: &str) -> Option<u32> {
    let (radix, digits) = match text.get(..2)? {
        "0x" => (16, &text[2..]),
        "0o" => (8, &text[2..]),
        _ => return None,
    };
    let is_number = !digits.is_empty() && digits.chars().all(|digit| digit.is_digit(radix));
    is_number.then_some(radix)
}

/// Whether it is `[0-9]* (\.[0-9]*)? (e[-+]?[0-9]+)?` with a digit before the exponent.
fn is_float(text: &str) -> bool {
    let (mantissa, exponent) = match text.split_once('e') {
        Some((mantissa, exponent)) => (mantissa, Some(exponent)),
        None => (text, None),
    };
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let is_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    let is_exponent = |text: &str| {
        let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
        !digits.is_empty() && is_digits(digits)
    };
    is_digits(whole)
        && is_digits(fraction)
        && !(whole.is_empty() && fraction.is_empty())
        && exponent.is_none_or(is_exponent)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn plain_scalars_mean_what_yaml_says() {
        let cases = [
            ("", json!(null)),
            ("~", json!(null)),
            ("True", json!(true)),
            ("-7", json!(-7)),
            ("+7", json!(7)),
            ("0x1F", json!(31)),
            ("0o17", json!(15)),
            ("1e-3", json!(0.001)),
            (".5", json!(0.5)),
            ("5.", json!(5.0)),
            ("-1.5E+2", json!(-150.0)),
            ("1.2.3", json!("1.2.3")),
            ("e5", json!("e5")),
            (".", json!(".")),
            ("1e", json!("1e")),
            ("0x", json!("0x")),
            ("-", json!("-")),
            ("é", json!("é")),
            ("nan", json!("nan")),
        ];
        for (text, expected) in cases {
            assert_eq!(resolve(text), Scalar::Value(expected), "{text}");
        }
    }

    #[test]
    fn what_readers_disagree_on_is_refused() {
        let cases = ["yes", "Off", "010", ".inf", "-.INF", ".nan", "9223372036854775808", "1e999"];
        for text in cases {
            assert!(matches!(resolve(text), Scalar::Refused(_)), "{text}");
        }
    }
}
