//! Quantities of Kubernetes.

/// Parses a quantity, such as `500m` or `16Gi`: a decimal number with an optional suffix. Returns
/// `None` for other texts, also for the form with an exponent.
///
/// Source: `resource.Quantity` of Kubernetes.
pub fn parse(text: &str) -> Option<f64> {
    let suffix = text.trim_start_matches(|char: char| char.is_ascii_digit() || char == '.');
    let number: f64 = text[..text.len() - suffix.len()].parse().ok()?;
    let factor = match suffix {
        "n" => 1e-9,
        "u" => 1e-6,
        "m" => 1e-3,
        "" => 1.0,
        "k" => 1e3,
        "M" => 1e6,
        "G" => 1e9,
        "T" => 1e12,
        "P" => 1e15,
        "E" => 1e18,
        "Ki" => 1024.0,
        "Mi" => 1024_f64.powi(2),
        "Gi" => 1024_f64.powi(3),
        "Ti" => 1024_f64.powi(4),
        "Pi" => 1024_f64.powi(5),
        "Ei" => 1024_f64.powi(6),
        _ => return None,
    };
    Some(number * factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_have_their_amount() {
        let check = |text: &str, expected: Option<f64>| assert_eq!(parse(text), expected, "{text}");
        check("4", Some(4.0));
        check("500m", Some(0.5));
        check("1.5k", Some(1500.0));
        check("2Gi", Some(2_147_483_648.0));
        check("1Pi", Some(1_125_899_906_842_624.0));
        check("", None);
        check("4x", None);
        check("Gi", None);
    }
}
