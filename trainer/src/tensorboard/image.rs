//! Images for TensorBoard, encoded as PNG.

use std::io::Write as _;

use flate2::Compression;
use flate2::write::ZlibEncoder;

use super::Message;
use crate::Result;

/// An image for TensorBoard, with 8 bits per channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    width: u32,
    height: u32,
    num_channels: usize,
    png: Vec<u8>,
}

impl Image {
    /// Creates an image.
    ///
    /// Values are from 0 (dark) to 1 (bright); others are clamped, and NaN is 0. One channel is
    /// gray, two are gray and opacity, three are red, green and blue, and four have opacity too.
    ///
    /// # Shapes
    ///
    /// - `shape`: `[channels, height, width]`
    /// - `values`: in the order of a contiguous burn tensor with this shape
    ///
    /// # Errors
    ///
    /// Fails if the shape has a zero or more than four channels, or if the number of values
    /// differs.
    ///
    /// ```
    /// let image = stoker_trainer::Image::new([1, 2, 2], &[0.0, 0.5, 0.5, 1.0])?;
    /// # Ok::<(), stoker_trainer::Error>(())
    /// ```
    pub fn new(shape: [usize; 3], values: &[f32]) -> Result<Self> {
        let [channels, height, width] = shape;
        Self::grid([1, channels, height, width], values, 1)
    }

    /// Creates one image of several equally large ones, in rows of `columns` images. The rest of
    /// the last row is 0.
    ///
    /// # Shapes
    ///
    /// - `shape`: `[images, channels, height, width]`
    /// - `values`: in the order of a contiguous burn tensor with this shape
    ///
    /// # Errors
    ///
    /// Same as [`new`](Self::new). Also fails if `columns` is 0.
    pub fn grid(shape: [usize; 4], values: &[f32], columns: usize) -> Result<Self> {
        let [images, channels, height, width] = shape;
        let num_values =
            shape.iter().try_fold(1, |product: usize, size| product.checked_mul(*size));
        if num_values != Some(values.len()) || values.is_empty() {
            let text = format!(
                "an image of shape {shape:?} (images, channels, height, width) cannot have {} \
                 values; pass their product, which must not be 0",
                values.len()
            );
            return Err(text.into());
        }
        // The color type of PNG.
        let color_type = match channels {
            1 => 0,
            2 => 4,
            3 => 2,
            4 => 6,
            _ => {
                let text = format!(
                    "an image cannot have {channels} channels; pass 1 (gray), 2 (gray, opacity), \
                     3 (RGB) or 4 (RGB, opacity)"
                );
                return Err(text.into());
            }
        };
        if columns == 0 {
            return Err("a grid of images cannot have 0 columns; pass at least 1".into());
        }
        let columns = columns.min(images);
        let (all_width, all_height) = (columns * width, images.div_ceil(columns) * height);
        let mut pixels = vec![0_u8; all_width * all_height * channels];
        for (index, value) in values.iter().enumerate() {
            let (rest, x) = (index / width, index % width);
            let (rest, y) = (rest / height, rest % height);
            let (image, channel) = (rest / channels, rest % channels);
            let (x, y) = (image % columns * width + x, image / columns * height + y);
            // The conversion saturates, and maps NaN to 0.
            pixels[(y * all_width + x) * channels + channel] = (value * 255.0).round() as u8;
        }
        let size = |size: usize| {
            u32::try_from(size).map_err(|_| format!("an image of {size} pixels is too large"))
        };
        let (width, height) = (size(all_width)?, size(all_height)?);
        let png = encode([width, height], color_type, &pixels, all_width * channels)
            .map_err(|error| format!("cannot encode an image as PNG: {error}"))?;
        Ok(Self { width, height, num_channels: channels, png })
    }

    /// Returns the protocol buffer `Summary.Image`.
    pub(super) fn message(&self) -> Message {
        let mut message = Message::default();
        message.varint(1, self.height.into());
        message.varint(2, self.width.into());
        message.varint(3, self.num_channels as u64);
        message.bytes(4, &self.png);
        message
    }
}

/// Encodes rows of pixels as PNG (ISO/IEC 15948), with 8 bits per sample.
fn encode(
    size: [u32; 2],
    color_type: u8,
    pixels: &[u8],
    row_bytes: usize,
) -> std::io::Result<Vec<u8>> {
    let mut png = b"\x89PNG\r\n\x1a\n".to_vec();
    let mut header = size.map(u32::to_be_bytes).concat();
    // Bits per sample, color type, compression, filter method, no interlacing.
    header.extend([8, color_type, 0, 0, 0]);
    chunk(&mut png, b"IHDR", &header)?;
    let mut zlib = ZlibEncoder::new(Vec::new(), Compression::default());
    for row in pixels.chunks(row_bytes) {
        // Filter 0: none.
        zlib.write_all(&[0])?;
        zlib.write_all(row)?;
    }
    chunk(&mut png, b"IDAT", &zlib.finish()?)?;
    chunk(&mut png, b"IEND", &[])?;
    Ok(png)
}

/// Appends a chunk: length, type, data, CRC-32 of type and data.
fn chunk(png: &mut Vec<u8>, kind: &[u8; 4], data: &[u8]) -> std::io::Result<()> {
    let length = u32::try_from(data.len()).map_err(std::io::Error::other)?;
    png.extend(length.to_be_bytes());
    let begin = png.len();
    png.extend(kind);
    png.extend(data);
    let crc = crc32fast::hash(&png[begin..]);
    png.extend(crc.to_be_bytes());
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    /// Returns the rows of pixels of an image. A test with TensorBoard checks the chunks.
    fn decode(image: &Image) -> Vec<Vec<u8>> {
        let (begin, end) = (8 + 25 + 8, image.png.len() - 12 - 4);
        assert_eq!(image.png[begin - 4..begin], *b"IDAT");
        let mut bytes = Vec::new();
        flate2::read::ZlibDecoder::new(&image.png[begin..end]).read_to_end(&mut bytes).unwrap();
        let row = 1 + image.width as usize * image.num_channels;
        assert_eq!(bytes.len(), row * image.height as usize);
        bytes.chunks(row).map(|row| row[1..].to_vec()).collect()
    }

    #[test]
    fn values_become_pixels() {
        let check = |shape: [usize; 3], values: &[f32], expected: &[&[u8]]| {
            assert_eq!(decode(&Image::new(shape, values).unwrap()), expected);
        };
        check([1, 2, 2], &[0.0, 0.5, 1.0, f32::NAN], &[&[0, 128], &[255, 0]]);
        check([1, 1, 3], &[-1.0, 7.0, f32::INFINITY], &[&[0, 255, 255]]);
        check([3, 1, 2], &[0.0, 0.2, 0.4, 0.6, 0.8, 1.0], &[&[0, 102, 204, 51, 153, 255]]);
    }

    #[test]
    fn images_are_arranged_in_rows() {
        let values: Vec<f32> = (0..12).map(|value| value as f32 / 255.0).collect();
        let image = Image::grid([3, 1, 2, 2], &values, 2).unwrap();
        assert_eq!(
            decode(&image),
            [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 0, 0], [10, 11, 0, 0]].map(Vec::from)
        );
        let image = Image::grid([2, 1, 1, 1], &values[..2], 9).unwrap();
        assert_eq!(decode(&image), [vec![0, 1]]);
    }

    #[test]
    fn impossible_shapes_are_refused() {
        let check = |shape, columns, expected: &str| {
            let error = Image::grid(shape, &[0.0; 6], columns).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        };
        check([1, 1, 2, 2], 1, "cannot have 6 values; pass their product");
        check([0, 1, 2, 2], 1, "cannot have 6 values");
        check([1, 6, 1, 1], 1, "cannot have 6 channels; pass 1 (gray)");
        check([2, 1, 3, 1], 0, "cannot have 0 columns");
        assert!(Image::new([1, 0, 3], &[]).is_err());
    }
}
