//! Truncation of text to a size in JSON.

/// Maximum size in bytes of a message in a status, as JSON.
pub const MESSAGE_BYTES_MAX: usize = 1000;

/// Marker at the end of truncated text.
const TRUNCATION_MARK: &str = "…";

/// Truncates `text` to at most `bytes_max` bytes of JSON, excluding quotes. A control character
/// takes up to six bytes in JSON. Truncated text ends with `…`.
///
/// # Examples
///
/// ```
/// let mut text = "größer".to_owned();
/// stoker_api::text::bound(&mut text, 7);
/// assert_eq!(text, "grö…");
/// ```
pub fn bound(text: &mut String, bytes_max: usize) {
    let (mut num_bytes, mut end) = (0, 0);
    for (at, character) in text.char_indices() {
        if num_bytes + TRUNCATION_MARK.len() <= bytes_max {
            end = at;
        }
        num_bytes += json_bytes(character);
        if num_bytes > bytes_max {
            text.truncate(end);
            text.push_str(TRUNCATION_MARK);
            return;
        }
    }
}

/// Returns the size in bytes of a character in JSON.
fn json_bytes(character: char) -> usize {
    match character {
        '"' | '\\' | '\n' | '\r' | '\t' | '\u{8}' | '\u{c}' => 2,
        '\0'..='\u{1f}' => 6,
        other => other.len_utf8(),
    }
}

/// Returns whether a text ends with the mark of truncated ones.
pub fn is_truncated(text: &str) -> bool {
    text.ends_with(TRUNCATION_MARK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_cut_at_character_boundaries() {
        let check = |text: &str, bytes_max: usize, expected: &str| {
            let mut bounded = text.to_owned();
            bound(&mut bounded, bytes_max);
            assert_eq!(bounded, expected, "{text:?} {bytes_max}");
            let json = serde_json::to_string(&bounded).unwrap();
            assert!(json.len() - 2 <= bytes_max, "{json}");
        };
        check("", 3, "");
        check("abcd", 4, "abcd");
        check("abcde", 4, "a…");
        check("ééé", 6, "ééé");
        check("éééé", 6, "é…");
        check("\u{1}\u{1}", 12, "\u{1}\u{1}");
        check("\u{1}\u{1}a", 12, "\u{1}…");
        check("\"\"\"", 5, "\"…");
    }
}
