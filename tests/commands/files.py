"""Documents of several kinds, written by hand or by the libraries that read them."""

from pathlib import Path

import docx
from pypdf import PdfReader, PdfWriter


def write_pdf(path: Path, *pages: str) -> None:
    """Write a PDF with a line of text on each page; "" makes a page without text."""
    streams = [f"BT /F1 12 Tf 72 720 Td ({page}) Tj ET" if page else "0 0 10 10 re f" for page in pages]
    numbers = [4 + 2 * index for index in range(len(pages))]
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Count {len(pages)} /Kids [{' '.join(f'{number} 0 R' for number in numbers)}] >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for number, stream in zip(numbers, streams, strict=True):
        resources = "/Resources << /Font << /F1 3 0 R >> >>"
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] {resources} /Contents {number + 1} 0 R >>"
        )
        objects.append(f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream")
    body, places = "%PDF-1.4\n", []
    for number, content in enumerate(objects, start=1):
        places.append(len(body))
        body += f"{number} 0 obj\n{content}\nendobj\n"
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    size = len(objects) + 1
    body += f"xref\n0 {size}\n0000000000 65535 f \n{table}trailer\n<< /Size {size} /Root 1 0 R >>\nstartxref\n"
    path.write_bytes(f"{body}{body.index('xref')}\n%%EOF\n".encode("latin-1"))


def encrypt_pdf(path: Path, password: str, algorithm: str = "RC4-128") -> None:
    writer = PdfWriter(PdfReader(path))
    writer.encrypt(user_password=password, owner_password="owner", algorithm=algorithm)
    writer.write(path)


def write_docx(path: Path) -> None:
    document = docx.Document()
    document.add_heading("A heading")
    document.add_paragraph("A first paragraph.")
    table = document.add_table(rows=1, cols=2)
    table.rows[0].cells[0].text, table.rows[0].cells[1].text = "left", "right"
    document.add_paragraph("A last one.")
    document.save(str(path))
