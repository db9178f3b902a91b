//! Resolves plain YAML scalars like `kubectl`, and refuses those on which YAML parsers disagree.
//!
//! `kubectl` parses YAML 1.1 with go-yaml v2 and sends JSON, in which `3.0` is the integer 3.

use serde_json::{Number, Value};

/// Meaning of a plain scalar.
#[derive(Debug, PartialEq)]
pub(super) enum Scalar {
    /// Value of the scalar.
    Value(Value),
    /// Ambiguous or unsupported scalar, with the violated rule.
    Refused(&'static str),
}

/// Resolves a plain scalar.
pub(super) fn resolve(text: &str) -> Scalar {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return Scalar::Value(Value::Null),
        "true" | "True" | "TRUE" => return Scalar::Value(Value::Bool(true)),
        "false" | "False" | "FALSE" => return Scalar::Value(Value::Bool(false)),
        _ => {}
    }
    let lower = text.to_ascii_lowercase();
    if matches!(lower.as_str(), "y" | "n" | "yes" | "no" | "on" | "off") {
        return Scalar::Refused(
            "is a boolean for some YAML parsers and a string for others; write true or false if it \
             is a boolean, or put it in quotes if it is a string",
        );
    }
    if !text.starts_with(['+', '-', '.']) && !text.starts_with(|char: char| char.is_ascii_digit()) {
        return Scalar::Value(Value::from(text));
    }
    if matches!(lower.strip_prefix(['+', '-']).unwrap_or(&lower), ".inf" | ".nan") {
        return Scalar::Refused("must be a finite number");
    }
    // Underscores may group digits, as in 1_000.
    let plain = lower.replace('_', "");
    match number(&plain) {
        // kubectl treats `.5_0` and `._5` differently.
        Some(_) if text.starts_with('.') && plain.len() < text.len() => Scalar::Refused(
            "has underscores after a leading decimal point; remove them or put it in quotes",
        ),
        Some(scalar) => scalar,
        None => Scalar::Value(Value::from(text)),
    }
}

/// Parses a number in lowercase; `None` if the text is a string.
fn number(text: &str) -> Option<Scalar> {
    let (sign, unsigned) = match text.strip_prefix(['+', '-']) {
        Some(unsigned) => (&text[..1], unsigned),
        None => ("", text),
    };
    if let Some((radix, digits)) = radix(unsigned) {
        return Some(integer(i64::from_str_radix(&format!("{sign}{digits}"), radix).ok()));
    }
    if !unsigned.is_empty() && unsigned.bytes().all(|byte| byte.is_ascii_digit()) {
        if unsigned.len() > 1 && unsigned.starts_with('0') {
            return Some(Scalar::Refused(
                "is octal for some YAML parsers and decimal for others; remove the leading zeros \
                 or put it in quotes",
            ));
        }
        return Some(integer(text.parse().ok()));
    }
    if !is_float(unsigned) {
        return None;
    }
    // Rust accepts `1.`, `.5` and `+1`, like YAML.
    let number = text.parse::<f64>().ok().filter(|number| number.is_finite());
    Some(match number {
        // Go's JSON writes numbers without a fraction as integers, with the fewest digits.
        Some(number) => match number.to_string().parse::<i64>() {
            Ok(integer) => Scalar::Value(Value::from(integer)),
            Err(_) => Scalar::Value(Number::from_f64(number).map_or(Value::Null, Value::Number)),
        },
        None => Scalar::Refused("must be a finite number"),
    })
}

fn integer(value: Option<i64>) -> Scalar {
    value.map_or(
        Scalar::Refused("must be an integer from -2^63 to 2^63 - 1, or a string in quotes"),
        |value| Scalar::Value(Value::from(value)),
    )
}

/// Returns the radix and the digits after a prefix such as `0x`.
fn radix(text: &str) -> Option<(u32, &str)> {
    let radix = match text.get(..2)? {
        "0x" => 16,
        "0o" => 8,
        "0b" => 2,
        _ => return None,
    };
    let digits = &text[2..];
    let is_number = !digits.is_empty() && digits.chars().all(|digit| digit.is_digit(radix));
    is_number.then_some((radix, digits))
}

/// Returns `true` for `[0-9]* (\.[0-9]*)? (e[-+]?[0-9]+)?` with a digit before the exponent.
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

    /// Expected values are from sigs.k8s.io/yaml 1.6.0, the YAML parser of `kubectl`.
    #[test]
    fn plain_scalars_resolve_like_kubectl() {
        let cases = [
            ("", json!(null)),
            ("~", json!(null)),
            ("True", json!(true)),
            ("tRUE", json!("tRUE")),
            ("nULL", json!("nULL")),
            ("-7", json!(-7)),
            ("+7", json!(7)),
            ("-0", json!(0)),
            ("0x1F", json!(31)),
            ("-0x1F", json!(-31)),
            ("+0x1f", json!(31)),
            ("0X1F", json!(31)),
            ("0x_1F_", json!(31)),
            ("0o17", json!(15)),
            ("-0o17", json!(-15)),
            ("0O17", json!(15)),
            ("0b11", json!(3)),
            ("-0B11", json!(-3)),
            ("1_000", json!(1000)),
            ("1__0_", json!(10)),
            ("-_1", json!(-1)),
            ("_1", json!("_1")),
            ("1_a", json!("1_a")),
            ("1e3", json!(1000)),
            ("1_e3", json!(1000)),
            ("1e-3", json!(0.001)),
            ("3.0", json!(3)),
            (".5", json!(0.5)),
            ("+.5", json!(0.5)),
            ("5.", json!(5)),
            ("1.e5", json!(100_000)),
            ("01.5", json!(1.5)),
            ("1.5_5", json!(1.55)),
            ("-1.5E+2", json!(-150)),
            ("-0.0", json!(0)),
            ("1152921504606846976.0", json!(1_152_921_504_606_847_000_i64)),
            ("9223372036854775807", json!(i64::MAX)),
            ("-9223372036854775808", json!(i64::MIN)),
            ("-0x8000000000000000", json!(i64::MIN)),
            ("1e20", json!(1e20)),
            ("1.2.3", json!("1.2.3")),
            ("1:30", json!("1:30")),
            ("2026-11-22", json!("2026-11-22")),
            ("2026-11-22 10:00:00", json!("2026-11-22 10:00:00")),
            ("2026-11-22T10:00:00Z", json!("2026-11-22T10:00:00Z")),
            ("e5", json!("e5")),
            (".", json!(".")),
            ("..", json!("..")),
            ("1e", json!("1e")),
            ("0x", json!("0x")),
            ("0x-1", json!("0x-1")),
            ("0b12", json!("0b12")),
            ("0o18", json!("0o18")),
            ("0x1.8p3", json!("0x1.8p3")),
            ("-", json!("-")),
            ("+-1", json!("+-1")),
            ("é", json!("é")),
            ("nan", json!("nan")),
            ("+inf", json!("+inf")),
        ];
        for (text, expected) in cases {
            assert_eq!(resolve(text), Scalar::Value(expected), "{text}");
        }
    }

    #[test]
    fn ambiguous_scalars_are_refused() {
        let cases = [
            "y",
            "N",
            "yes",
            "Off",
            "010",
            "-010",
            "0_8",
            ".inf",
            "-.INF",
            ".nan",
            "9223372036854775808",
            "-9223372036854775809",
            "0x8000000000000000",
            "1e999",
            "._5",
            ".5_0",
        ];
        for text in cases {
            assert!(matches!(resolve(text), Scalar::Refused(_)), "{text}");
        }
    }
}
